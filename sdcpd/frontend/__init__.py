"""Floor 5: text in, text out: tokenizer, chat template, the OpenAI shapes."""
