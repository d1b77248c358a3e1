"""Forests and the tries behind them."""
