"""nnU-Net's trainer with a network that trains in less memory (docs/coming-from-nnunet.md).

nnUNet_extTrainer=examples/nnunet nnUNetv2_train 4 3d_fullres 0 -tr nnUNetTrainer_unet3d
"""

import os

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

import unet3d


class nnUNetTrainer_unet3d(nnUNetTrainer):
    """Trains as nnUNetTrainer does, in less memory; with UNET3D_BUDGET=6GiB it recomputes as little as fits."""

    @staticmethod
    def build_network_architecture(
        plans_manager, configuration_manager, num_input_channels, num_output_channels, enable_deep_supervision=True
    ):
        """Return nnU-Net's network, with its names of weights."""
        network = nnUNetTrainer.build_network_architecture(
            plans_manager, configuration_manager, num_input_channels, num_output_channels, enable_deep_supervision
        )
        budget = os.environ.get("UNET3D_BUDGET")
        plan = "auto" if budget else os.environ.get("UNET3D_PLAN", "lean")
        momentum = sum(parameter.nbytes for parameter in network.parameters())
        return unet3d.recompute(network, plan=plan, budget=budget, held=momentum)
