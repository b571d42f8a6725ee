"""Rendering of messages to tokens and parsing of sampled tokens to replies, over the `renderers`
package.

Rule: sampled ids are never encoded again; a prompt is either rendered in full or is the sampled
stream followed by new tokens.
"""
