"""Accuracy of models on a split and on ImageNet's additional test sets, and paired comparison of two models."""
