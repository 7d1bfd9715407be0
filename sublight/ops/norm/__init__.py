"""LayerNorm and RMSNorm, alone and with the residual that is added before."""
