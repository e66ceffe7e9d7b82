"""mlxgen: language models on Apple Silicon as one declarative graph."""
