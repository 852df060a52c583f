"""Train a 3D U-Net: python train.py model=unet_small amp=true ckpt=2"""

from unet3d.cli import interrupt

if __name__ == "__main__":
    with interrupt.answered(interrupt.STOPPED):
        from unet3d.cli.train import main

        raise SystemExit(main())
