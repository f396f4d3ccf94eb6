"""Vision Longhorn models: blocks, their fused kernels, timm registrations and published weights."""
