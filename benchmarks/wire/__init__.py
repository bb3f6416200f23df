# SPDX-License-Identifier: Apache-2.0
"""What the stream between router and worker costs: CPU seconds at each end for 100,000 tokens.

Two processes speak worker.proto as router and workers do: one makes steps (`codec.encode_step`, a message a step), the
other reads them (`codec.decode_step`), 256 streams with a token each in a step. The aim: at most 0.25 CPU s at each
end. The peers, in the same run: a message a token, which is what a stream a request comes to, and steps that hold no
requests, which is what gRPC itself costs for each message.
"""
