"""Accuracy of models: over a split, on ImageNet's other test sets, and of two models on the same images."""
