"""Names and arguments of transformer_engine.pytorch over fourwave: a training script changes its import."""
