"""The parts of `tests/bench/cuda_desk.py`: torch's CUDA build over libraries that compute nothing."""
