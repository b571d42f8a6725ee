"""Helpers of the tests. Take the first of a list that shows what is tested.

Records: `ledger` makes turns and reads rows, `stories` has a turn in every state and runs commands
over them, `many_turns` fills a ledger.

The product's parts, in this process:
  `gateways.gateway`    HTTP over a real ledger; the model recites (`fakes.FakeSampler`)
  `learning.world`      judge and learner over a real ledger; trainer and judge do as they are told
  `gateways.wired`      all parts with their real models, as the product wires them
  `scripted_users`      the demo's users talk to those

The product as a process: `lives.product` serves, `lives.life` may also be killed or slowed;
`clients` talk to it, `terminals` shows what it prints.

Requests: `gateways.chat` for plain ones, `openclaw` as OpenClaw writes them, `talks` on every wire.

Models and trainers: `backends` and `models` write tiny ones, `local_reference` has the formulas,
`contract` what every backend promises. The stand-in for Tinker is `tinker`, with `faults` and
`tinker_dialects`; those for vLLM are `inference_servers` and `pools`, the real one `real_vllm`.

Judges: `fakes.rated` is an answer, `bad_judges` break it, `obedient_judge` believes everything.

Programs of others: `coding_agents`, `agent_sdks`, `real_openclaw`.

Waiting: `waits.eventually` in an event loop, `lives.until` elsewhere. Servers in a thread: `ports`.
"""
