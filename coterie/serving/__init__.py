"""What comes after training: models for new clients, and models as files."""
