"""Train a 3D U-Net: python train.py model=unet_small amp=true ckpt=2"""

from unet3d.base import signals

if __name__ == "__main__":
    with signals.answered(is_training=True):
        from unet3d.cli.train import main

        raise SystemExit(main())
