"""Starting kernels.

``config`` holds the tile table by architecture and says what a device is (it imports no triton), ``launch``
starts the kernels over tiles, ``split`` cuts long lists, ``plans`` keeps launches for later calls and
``passes`` all those of a pass, ``tune`` measures configurations on the GPU at hand.
"""
