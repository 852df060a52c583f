"""unet3d: train 3D U-Nets and know where the memory goes."""

__version__ = "0.1.0"
