"""Weight folders: Hugging Face in and out, GGUF in, dense folders upcycled to mixtures."""

from sat_jax.hub.config import config_from_hf, config_to_hf, read_config
from sat_jax.hub.folder import load_params, save_hf

__all__ = ["config_from_hf", "config_to_hf", "load_params", "read_config", "save_hf"]
