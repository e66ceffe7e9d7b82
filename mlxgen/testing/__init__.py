"""Small parts for tests: tokenizers, models, scripts. Public, so that users can test with them."""
