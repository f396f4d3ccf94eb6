"""Vision Longhorn models: blocks, dispatch to fused kernels, timm registrations and pretrained weights."""
