"""A Transformers folder as a GGUF file, by llama.cpp's own converter.

    python peer_llama_convert.py LLAMA.CPP-SOURCE MODEL OUTPUT

The converter refuses tokenizers that it has not seen, and would look for one of another kind first.
Ours splits as Qwen's does, so it is told so.
"""

import sys

source, model, output = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

import convert_hf_to_gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402
from conversion.qwen import Qwen2Model  # noqa: E402

Qwen2Model.set_vocab = TextModel._set_vocab_gpt2
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", output, "--outtype", "bf16"]
convert_hf_to_gguf.main()
