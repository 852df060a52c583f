"""Train a 3D U-Net: python train.py model=unet_small amp=true ckpt=2"""

from unet3d.__main__ import train

if __name__ == "__main__":
    raise SystemExit(train())
