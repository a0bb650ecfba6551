"""Client-level differential privacy: what rounds cost, and the noisy mean that the server sees."""
