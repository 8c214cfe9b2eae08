"""Offers with prices and dates."""
