"""The contract: what a method is written in and what it is written against; nothing here trains or reads files."""
