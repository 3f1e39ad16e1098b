"""SGLang servers as an engine: token ids in, token ids and log-probabilities out, new weights after each step. Built to the
protocol of SGLang 0.5.23 and tested against a small server that holds to it; not yet run against SGLang itself."""
