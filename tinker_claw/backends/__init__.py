"""Services that train and sample for us, behind the trainer interface of `policy`."""
