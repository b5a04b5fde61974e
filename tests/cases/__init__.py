"""Inputs and checks that several tests share, imported as ``cases`` (``pythonpath`` in pyproject.toml).

=================  ==============================================================================
edge_call          the C++ edge kernels called directly
edges              graphs and comparisons for edge kernels, C++ and Triton
tiles              relations, shapes and comparisons for tile kernels, C++ and Triton
terms              score terms of every kind, compared with float64 on any backend
scores             additive scores and edge terms for Triton kernels
relations          relations that hold data
processes          processes on this machine that form a group
sharded            what they compute: problems whole and sharded
sharded_graphs     what they compute over graphs
sharded_layers     what they compute with layers of PyG
dtensors           the same on DTensors
parallel           models over processes: tensor parallel, FSDP2, shards
hf_ranks           Hugging Face models over processes
places             parts of a problem, computed at their places, compared with the whole
compiled           modules with attention, compiled or exported, compared with eager ones
reads              counts what the host reads from tensors
interpreter        runs a test file again in Triton's interpreter
fake_cuda          a stand-in for torch.cuda whose host and device have clocks of their own
fake_cudnn         a stand-in for NVIDIA's ``cudnn.flex_attention``
cudnn_programs     compiles what the backend ``cudnn`` would run, as a program of its own
gpu_programs       small Triton programs for the emulator
handwritten_ptx    kernels written in PTX by hand, for the emulator
benchmarks         a run of benchmarks, as its record has it
source             the project's source, for test_house
pyg                graphs and options for comparing the layers with PyG's
huggingface        tiny models and comparisons
huggingface_zoo    a tiny configuration of every architecture of transformers
=================  ==============================================================================

A helper goes here when tests of two files need it. Helpers import ``attnbias`` and each other, never a test.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
