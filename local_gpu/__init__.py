"""The included torch backend: LoRA training and sampling on this machine.

Rule: torch, peft and transformers' model classes are imported in this package alone, and nothing in
`tinker_claw` imports it but the wirer, when the settings ask for it.
"""
