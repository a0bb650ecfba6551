"""coterie: personalized federated learning, every method under one contract, one evaluator, two engines."""

__version__ = "0.1.0"
