"""Client-level differential privacy: what rounds cost in epsilon, and the streams of noise and sampling."""
