"""Distillation: losses, the order in which text is read, and the trainer.

Works on tensors and modules, not recipes or files. Quantization-aware training is the same trainer with a student whose
linears round their weights (``quant/training/qat.py``).
"""
