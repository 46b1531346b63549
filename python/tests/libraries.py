"""Tensors as other libraries hand them over."""


class FromLibrary:
    """A tensor of a library of which nothing is known but DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()
