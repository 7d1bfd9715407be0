"""Diagnosis: kernels that are right and slow. Name the cause, mend it, meet the saving that the bound promises."""
