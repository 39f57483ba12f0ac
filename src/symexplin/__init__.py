"""symexplin: train any PyTorch model in curved weight space and own ordinary weights at every step."""

__all__: list[str] = []
