"""Shapes of attention in real models, for compare.py --set models.

Each is taken from a model's public configuration; ``source`` is its repository on the Hugging Face
hub, or the paper where there is none. Lengths and batches are what the model is trained or run
with. ``window`` counts the keys that a query sees, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Attention of one layer of a model in one use of it."""

    name: str
    source: str
    heads: int
    kv_heads: int
    d: int
    seqlen: int  # of the keys
    batch: int = 1
    causal: bool = True
    seqlen_q: int = 0  # 0: seqlen
    d_v: int = 0  # 0: d
    window: int = 0  # 0: unlimited
    backward: bool = True  # is it trained in this shape?


# Text, from 1k tokens to 128k.
LANGUAGE = (
    ModelShape("GPT-2", "openai-community/gpt2", 12, 12, 64, 1024, batch=16),
    ModelShape("GPT-2 XL", "openai-community/gpt2-xl", 25, 25, 64, 1024, batch=8),
    ModelShape("GPT-J 6B", "EleutherAI/gpt-j-6b", 16, 16, 256, 2048, batch=4),
    ModelShape("Phi-2", "microsoft/phi-2", 32, 32, 80, 2048, batch=4),
    ModelShape("Phi-3 mini", "microsoft/Phi-3-mini-4k-instruct", 32, 32, 96, 4096, window=2047),
    ModelShape("Falcon 7B", "tiiuae/falcon-7b", 71, 1, 64, 2048, batch=4),
    ModelShape("SmolLM2 135M", "HuggingFaceTB/SmolLM2-135M", 9, 3, 64, 2048, batch=8),
    ModelShape("Qwen2.5 0.5B", "Qwen/Qwen2.5-0.5B", 14, 2, 64, 4096, batch=4),
    ModelShape("Qwen3 0.6B", "Qwen/Qwen3-0.6B", 16, 8, 128, 4096, batch=4),
    ModelShape("Qwen2.5 7B", "Qwen/Qwen2.5-7B", 28, 4, 128, 8192, batch=2),
    ModelShape("Llama 3.2 1B", "meta-llama/Llama-3.2-1B", 32, 8, 64, 8192, batch=2),
    ModelShape("Llama 3.1 8B", "meta-llama/Llama-3.1-8B", 32, 8, 128, 8192, batch=2),
    ModelShape("Llama 3.1 8B, 32k", "meta-llama/Llama-3.1-8B", 32, 8, 128, 32768),
    ModelShape("Llama 3.1 8B, 128k", "meta-llama/Llama-3.1-8B", 32, 8, 128, 131072, backward=False),
    ModelShape("Llama 3.1 70B", "meta-llama/Llama-3.1-70B", 64, 8, 128, 4096, batch=2),
    ModelShape("Mistral 7B", "mistralai/Mistral-7B-v0.1", 32, 8, 128, 16384, window=4096),
    ModelShape("Gemma 2B", "google/gemma-2b", 8, 1, 256, 8192, batch=2),
    ModelShape("Gemma 2 9B, global layers", "google/gemma-2-9b", 16, 8, 256, 8192),
    ModelShape("Gemma 2 9B, local layers", "google/gemma-2-9b", 16, 8, 256, 8192, window=4096),
    ModelShape("Gemma 3 1B, local layers", "google/gemma-3-1b-pt", 4, 1, 256, 32768, window=512),
    ModelShape("gpt-oss 20B, local layers", "openai/gpt-oss-20b", 64, 8, 64, 16384, window=128),
    ModelShape("DeepSeek-V3", "deepseek-ai/DeepSeek-V3", 128, 128, 192, 4096, d_v=128),
)

# Encoders, images, speech, video, proteins: no mask.
OTHERS = (
    ModelShape("BERT base", "google-bert/bert-base-uncased", 12, 12, 64, 512, 32, causal=False),
    ModelShape("ViT-B/16", "google/vit-base-patch16-224", 12, 12, 64, 197, 128, causal=False),
    ModelShape("CLIP ViT-L/14 336", "openai/clip-vit-large-patch14-336", 16, 16, 64, 577, 32,
               causal=False),
    ModelShape("ViT-H/14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 16, 16, 80, 257, 64,
               causal=False),
    ModelShape("ViT-H/14, 448 pixels", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", 16, 16, 80, 1025,
               16, causal=False),
    ModelShape("SigLIP so400m", "google/siglip-so400m-patch14-384", 16, 16, 72, 729, 16,
               causal=False),
    ModelShape("Whisper large v3, encoder", "openai/whisper-large-v3", 20, 20, 64, 1500, 8,
               causal=False),
    ModelShape("Stable Diffusion 1.5, 64 x 64",
               "stable-diffusion-v1-5/stable-diffusion-v1-5", 8, 8, 40, 4096, 8, causal=False),
    ModelShape("Stable Diffusion 1.5, 32 x 32",
               "stable-diffusion-v1-5/stable-diffusion-v1-5", 8, 8, 80, 1024, 8, causal=False),
    ModelShape("Stable Diffusion 1.5, 16 x 16",
               "stable-diffusion-v1-5/stable-diffusion-v1-5", 8, 8, 160, 256, 16, causal=False),
    ModelShape("SDXL, 64 x 64", "stabilityai/stable-diffusion-xl-base-1.0", 10, 10, 64, 4096, 4,
               causal=False),
    ModelShape("SDXL, 64 x 64 to text", "stabilityai/stable-diffusion-xl-base-1.0", 10, 10, 64, 77,
               4, causal=False, seqlen_q=4096),
    ModelShape("FLUX.1", "black-forest-labs/FLUX.1-dev", 24, 24, 128, 4608, causal=False),
    ModelShape("Wan 2.1 14B, 480p", "Wan-AI/Wan2.1-T2V-14B", 40, 40, 128, 32760, causal=False),
    ModelShape("HunyuanVideo, 720p", "tencent/HunyuanVideo", 24, 24, 128, 119056, causal=False,
               backward=False),
    ModelShape("AlphaFold 2, triangle attention", "Jumper et al. 2021, algorithm 13", 4, 4, 32, 384,
               384, causal=False),
    ModelShape("AlphaFold 2, MSA rows", "Jumper et al. 2021, algorithm 7", 8, 8, 32, 256, 128,
               causal=False),
)  # fmt: skip

# Generation: a prompt in chunks, one token, several that were guessed.
SERVING = (
    ModelShape("Llama 3.1 8B, chunk of 2,048 after 30k", "meta-llama/Llama-3.1-8B", 32, 8, 128,
               32768, seqlen_q=2048, backward=False),
    ModelShape("Llama 3.1 8B, decoding 1k", "meta-llama/Llama-3.1-8B", 32, 8, 128, 1024,
               seqlen_q=1, backward=False),
    ModelShape("Llama 3.1 8B, decoding 32 x 4k", "meta-llama/Llama-3.1-8B", 32, 8, 128, 4096, 32,
               seqlen_q=1, backward=False),
    ModelShape("Gemma 2B, decoding 16 x 8k", "google/gemma-2b", 8, 1, 256, 8192, 16, seqlen_q=1,
               backward=False),
    ModelShape("Llama 3.1 70B, 5 guesses after 8k", "meta-llama/Llama-3.1-70B", 64, 8, 128, 8192,
               16, seqlen_q=5, backward=False),
)  # fmt: skip

SHAPES = (*LANGUAGE, *OTHERS, *SERVING)
