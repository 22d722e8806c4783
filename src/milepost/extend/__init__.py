"""Stretching pretrained models: rope types, exports, and a doctor for configurations."""
