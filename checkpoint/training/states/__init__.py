"""What a state consists of: the user's objects, their leaves and names, and the plain tensors behind each leaf.

It knows which of them all ranks share, and holds no bytes. No other room of the training process is imported here.

May import: `checkpoint.format`.
"""
