"""What several test files share: builders of messages, a toy engine, ports with nothing real behind them."""
