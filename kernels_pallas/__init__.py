"""Attention, key/value writes and the gate scan; knows nothing of models or sessions."""
