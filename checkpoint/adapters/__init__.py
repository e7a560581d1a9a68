"""Memory checkpoints in the loops of other libraries: PyTorch Lightning, Hugging Face's Trainer, Accelerate,
DeepSpeed.

Each module is thin, and imports its library. Muster needs none of them: import the module of the library that you use.

May import: `checkpoint.data`, `checkpoint.format`, `checkpoint.training`.
"""
