# SPDX-License-Identifier: Apache-2.0
"""What stands above the dispatcher (docs/router.md): each face turns clients' requests into engine-core requests.

switch.py        hands each request's outputs back to the face that brought it
lean.py          face one's short way for plain completions and chats
lean_stream.py   one such stream: detokenizing and its events
chunks.py        the events' form, learned from vLLM's own generators (forms.py)
whole.py         the same of answers that are not streamed
shapes.py        what vLLM has made of a request, for the next one that differs in its prompt alone
rust_front.py    face two: vLLM's Rust front end as a child
rust_relay.py    takes plain requests there, everything else to face one
virtual_core.py  what that front end believes to be its engine core
grpc_api.py      the engine for gRPC clients
"""
