"""What a model's layers cost, found without its weights."""
