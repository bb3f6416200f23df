# SPDX-License-Identifier: Apache-2.0
"""Questions about deltaserve and their answers, for training and for measuring.

Each topic has several phrasings and one short answer. The last phrasing of a topic is never trained on: it
measures whether the model answers a question that it has not seen word for word.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """One answer and the ways to ask for it; `phrasings[-1]` is held out of training."""

    phrasings: tuple[str, ...]
    answer: str


def _topics(text: str) -> tuple[Topic, ...]:
    """Parse blocks of `phrasing | phrasing | ...` lines followed by `> answer`."""
    topics = []
    phrasings: list[str] = []
    for line in text.strip().splitlines():
        if line.startswith("> "):
            topics.append(Topic(tuple(phrasings), line[2:].strip()))
            phrasings = []
        elif line.strip():
            phrasings += [part.strip() for part in line.split("|")]
    return tuple(topics)


TOPICS = _topics(
    """
What is deltaserve? | What is this project? | Tell me about deltaserve. | Describe deltaserve. | What does deltaserve do? | Explain what deltaserve is.
> deltaserve is a serving cluster for hybrid Kimi models on vLLM. Some workers prefill, others decode, and the answers match one engine.
What can you do? | Who are you? | What are you? | What are your skills? | How can you help me?
> I am a small demonstration model. I recall what you tell me, copy text, add small numbers and answer questions about deltaserve.
How do I start deltaserve? | How do I start it? | How do I run the cluster? | How can I launch deltaserve? | How do I start a server? | How do I start the cluster?
> Run make serve. It starts a whole cluster on one machine, and the endpoint listens on port 8000.
How do I run the tests? | How do I test it? | How can I test deltaserve? | What runs the tests? | Where do I start with testing? | How do I test deltaserve?
> Run make test. It checks format, types, units, properties and a real cluster.
What is a boundary? | What does boundary mean? | Explain boundaries. | Define a boundary. | Tell me what a boundary is.
> A boundary is the state after a known number of tokens: its model, its prefix hash, its length and its epoch.
What does the router do? | What is the router? | Explain the router. | What is the router for? | Tell me about the router.
> The router gives clients one OpenAI endpoint, picks a prefill and a decode worker, and streams the answer.
Where does the state live? | Where is the state stored? | Where is the state kept? | What holds the state? | Where do you keep the state?
> The state lives in a pinned Mooncake store between prefill and decode. Its records live in etcd.
What does verify do? | What is deltaserve verify? | What does deltaserve verify check? | Why should I run verify? | Explain the verify command.
> deltaserve verify sends the same prompts to the cluster and to one engine and shows that the tokens are equal.
What licence does it have? | What is the licence? | Which licence is used? | Is it open source? | Can I use it freely? | Under which licence is deltaserve?
> deltaserve has the Apache-2.0 licence, so you may use, change and share it.
What is KDA? | What does KDA mean? | Explain KDA. | What is Kimi Delta Attention? | Tell me about KDA.
> KDA is Kimi Delta Attention, a linear attention whose state has a fixed size, whatever the length of the text.
What is MLA? | What does MLA mean? | Explain MLA. | What is latent attention? | Tell me about MLA.
> MLA is multi-head latent attention. It caches one small latent vector for each token, the same on every rank.
Which models does it serve? | Which models are supported? | What models can I use? | Which models work? | What models does deltaserve run?
> It serves hybrid Kimi models: Kimi K3 and Kimi Linear.
How do operators deploy it? | How is it deployed? | How do I deploy deltaserve? | How do I install it in production? | How can operators deploy deltaserve?
> Operators deploy it with Helm or with Ray, and scale each role by itself.
What is DCP? | What does DCP mean? | Explain DCP. | What is decode context parallelism? | Tell me about DCP.
> DCP is decode context parallelism: the ranks of a decode worker share the tokens of one MLA cache.
What is ReplaySSM? | What does ReplaySSM do? | Explain ReplaySSM. | What is ReplaySSM speculation? | Tell me about ReplaySSM.
> ReplaySSM keeps the inputs of drafted tokens and replays only the accepted ones, so that no wrong state is ever written.
What is prefill? | What does prefill mean? | What does a prefill worker do? | Explain prefill. | Tell me about prefill workers.
> Prefill reads the whole prompt at once. A prefill worker computes all tokens but the last and publishes the state.
What is decode? | What does decode mean? | What does a decode worker do? | Explain decode. | Tell me about decode workers.
> Decode writes the answer token by token. A decode worker loads a verified state and continues from there.
Why split prefill and decode? | Why are prefill and decode apart? | Why separate workers? | Why are there two kinds of workers? | Why do you split prefill from decode?
> Long prompts then never delay running answers, and each role can have its own size and settings.
What is Mooncake? | What does Mooncake do? | Why Mooncake? | Explain Mooncake. | Tell me about Mooncake.
> Mooncake is the store that moves state between workers. Objects are pinned until their record is released.
What is etcd for? | What does etcd do? | Why etcd? | What is in etcd? | Explain the role of etcd.
> etcd records, rank by rank, which boundary states are complete, and who is in the cluster.
Which port is used? | What port does it use? | Which port does the endpoint use? | Where does the endpoint listen? | On which port is the endpoint?
> The endpoint listens on port 8000.
What API does it have? | Which API do clients use? | What is the API? | How do clients talk to it? | Which API does the cluster speak?
> Clients see one OpenAI endpoint on the router, over HTTP with streaming.
What does doctor do? | What is deltaserve doctor? | How do I check my setup? | Something is wrong, what do I run? | Explain the doctor command.
> deltaserve doctor checks the machine, the packages, the store and etcd, and says what to change.
What does deltaserve up do? | What is deltaserve up? | What does the up command do? | Explain deltaserve up. | Tell me about the up command.
> deltaserve up starts a whole cluster from one file: etcd, the store, the workers and the router.
What commands are there? | Which commands exist? | List the commands. | What can I run? | Show me the commands.
> The commands are make serve, make test, deltaserve up, deltaserve verify and deltaserve doctor.
What is vLLM? | What is vLLM for? | Is vLLM used? | Explain vLLM. | Tell me about vLLM.
> vLLM is the engine inside every worker. deltaserve uses it as it is and does not fork it.
What is an epoch? | What does epoch mean? | Explain epochs. | Why are there epochs? | Define an epoch.
> An epoch names one attempt to publish a state. Its keys are new, so an old value is never read.
What is checked before use? | What does a decode worker verify? | How is state verified? | When is state trusted? | What is verified before decode?
> A decode worker checks digest, epoch, length and that no block is null before it uses a state.
What if the state is damaged? | What happens to a bad state? | What if a digest is wrong? | Can damaged state be served? | What happens if state is damaged?
> Damaged state is never served. It is recomputed or fetched elsewhere, and counted.
What if a decode worker dies? | What happens when a decode worker is killed? | Is a request lost when a worker dies? | How does it recover? | What happens if a decode worker fails?
> The router resumes the request on another worker from the committed boundary. The client sees a pause, not an error.
What if a prefill worker dies? | What happens when prefill is killed? | Can prefill fail? | What happens if a prefill worker fails?
> Nothing half written becomes visible, and the router sends the request to another prefill worker.
What if etcd is away? | What happens without etcd? | Can it run without etcd? | Does it survive an etcd outage? | What happens when etcd fails?
> Serving goes on with the last known view, and workers register again when etcd returns.
How is KDA state sharded? | How is the state split? | How are heads sharded? | Who owns which head? | How does KDA state move between ranks?
> KDA state is sharded by head. Each decode rank reads the heads that it owns from the prefill ranks.
Do the sizes have to match? | Can tensor parallel sizes differ? | Must prefill and decode have the same size? | Can the roles use different tensor parallelism? | May tensor parallel sizes differ?
> No. Any sizes that divide the heads are mapped exactly, and anything else is refused by name.
What is a checkpoint? | What is an internal checkpoint? | Explain checkpoints. | What are prefix checkpoints? | Tell me about checkpoints.
> A checkpoint is a state inside a prompt that a later prompt with the same beginning can reuse.
What is a pin? | What does pinned mean? | Explain pins. | Why are objects pinned? | Tell me what a pin is.
> A pinned object or block is never evicted or reused before its last reader or writer has ended.
What is a lease? | What does lease mean? | Explain leases. | Define a lease. | Tell me what a lease is.
> A lease is a promise to be alive. When it ends, everything that its owner held is swept.
What is the ledger? | What does the ledger do? | Explain the ledger. | Tell me about the ledger.
> The ledger is the set of records in etcd that says which states are complete and visible.
What is a digest? | What does digest mean? | Why digests? | Explain digests. | Tell me about the digest.
> A digest is a checksum of the state's bytes, computed by the writer and checked by the reader.
Does it run on a CPU? | Can I run it without a GPU? | Do I need a GPU? | Is a GPU needed? | Will it work without a GPU?
> Yes, it runs on a CPU with this small model. For real models use GPUs.
Which GPUs work? | What hardware do I need? | Which GPU is needed? | What hardware does it run on? | Which GPUs are supported?
> It was measured on NVIDIA H200 GPUs, and it also runs on a CPU for tests.
Are the answers exact? | Is it exact? | How exact is it? | Do the answers differ from vLLM? | Are answers the same as one engine?
> Yes. It answers exactly as one vLLM engine would, token for token.
How do I scale it? | Can I scale the roles? | How does scaling work? | How do I add workers? | How can I scale the workers?
> Scale prefill and decode by themselves: start more workers, and the router finds them through etcd.
How do I watch it? | How do I monitor it? | Are there metrics? | Is there a dashboard? | How can I monitor the cluster?
> Every role has Prometheus metrics. There are dashboards and alerts, and deltaserve top shows the cluster live.
What is speculation? | What is speculative decoding? | Explain speculation. | How does speculation work? | Tell me about speculative decoding.
> A small draft guesses the next tokens and the model checks them in one step, so decoding is faster.
What is the MTP head? | What does MTP mean? | Explain MTP. | What is MTP? | Tell me about the MTP head.
> The MTP head predicts the token after the next one. It is the draft for speculation.
Who are you made by? | How were you trained? | Where do you come from? | How was this model trained? | Tell me how you were trained.
> I was trained in under ten minutes on one H200 GPU, on generated text, for deltaserve.
How big are you? | How large is this model? | How many parameters do you have? | What is your size? | How big is this model?
> I have about ten million parameters, eight layers and a small vocabulary.
What happens to long prompts? | How long can a prompt be? | What is the longest prompt? | Are long prompts supported? | How are long prompts handled?
> Long prompts go to prefill workers, which export reusable checkpoints on the way.
What happens to short prompts? | Are short prompts moved? | How are short prompts handled? | Do short prompts need prefill workers? | What about short prompts?
> A short prompt is computed on the decode worker itself when moving the state would cost more.
What is a rank? | What does rank mean? | Explain ranks. | Define a rank. | Tell me what a rank is.
> A rank is one process of a worker. Each rank holds its own shard of the model and the state.
What is drain? | How do I drain a worker? | What does drain mean? | How do I stop a worker safely? | Explain drain.
> A draining worker takes no new requests, ends the ones it has, and then leaves the cluster.
Is it secure? | Is the traffic safe? | How is it secured? | What about security? | Tell me about security.
> Keep the store and etcd in a private network, and put keys and TLS on the router.
Where are the docs? | Is there documentation? | Where can I read more? | Where do I find help? | Where is the documentation?
> Read the README first. The docs folder has one page for each protocol.
What is Helm? | How do I use Helm? | Is there a Helm chart? | How do I install the chart? | Tell me about the Helm chart.
> There is a Helm chart in deploy. It starts each role as its own workload.
What is Ray? | How do I use Ray? | Is Ray supported? | Can I deploy on Ray? | Tell me about Ray.
> There is a Ray deployment in deploy. It places each role on the nodes that fit it.
Can I cancel a request? | What happens on cancel? | How does cancel work? | What if a client goes away? | What happens when I cancel a request?
> Yes. A cancelled request gives back its blocks, pins, objects and records at every stage.
How fast is it? | What is the speed? | Is it fast? | How quick is it? | Tell me how fast it is.
> See the benchmarks folder. Each benchmark prints a table and compares with a peer in the same run.
What is MoE? | What is a mixture of experts? | Explain MoE. | Tell me about the mixture of experts.
> A mixture of experts sends each token to a few of many small networks, so most weights rest.
What is a handoff? | How does the handoff work? | Explain the handoff. | What happens between prefill and decode? | Tell me about the handoff.
> Every prefill rank writes its shard, one transaction commits the boundary, and the decode ranks read and verify it.
"""  # noqa: E501
)
GREETINGS = ("Hello", "Hi", "Hello there", "Hi there", "Hey", "Good morning", "Good day", "hello", "hi")
GREETING_ANSWER = "Hello! Ask me about deltaserve, or tell me something to remember."
THANKS = ("Thanks", "Thank you", "Thanks a lot", "Thank you very much", "ok thanks", "Great, thanks")
THANKS_ANSWER = "You are welcome."
