"""The parts of `benchmarks/cuda_desk.py`: torch's CUDA build over libraries that compute nothing."""
