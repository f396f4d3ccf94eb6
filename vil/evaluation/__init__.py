"""Evaluation of models on a validation or test split, and paired comparison of two models."""
