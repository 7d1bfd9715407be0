"""Mixture of experts: rows sorted by expert on the device, two grouped products, a weighted sum."""
