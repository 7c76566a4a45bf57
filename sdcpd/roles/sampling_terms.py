"""From a client's sampling wishes to rule, contract and policy (draft 4.1, 6.4, 6.6; decisions 18, 115)."""

from msgspec import UNSET, UnsetType

from sdcpd.protocol.draws import SEED_LIMIT
from sdcpd.protocol.messages import ContractSampling, Sampling
from sdcpd.protocol.terms import Rule
from sdcpd.roles.generation import GenerationRefused, GenerationRequest


def check_sampling(request: GenerationRequest) -> None:
    """Raises GenerationRefused for a profile that no contract could state."""
    for name, value, end in (
        ("temperature", request.temperature_milli, SEED_LIMIT),
        ("top_k", request.top_k, SEED_LIMIT),
        ("top_p", request.top_p_milli, 1001),
        ("seed", request.seed or 0, SEED_LIMIT),
    ):
        if not 0 <= value < end:
            raise GenerationRefused("invalid", f"{name} is out of range", param=name)
    rule = rule_of(request)
    if rule not in (Rule.GREEDY, Rule.SPECULATIVE_SAMPLING, Rule.REPLAYABLE_SAMPLING):
        raise GenerationRefused("invalid", f"there is no acceptance rule {rule}")
    if rule == Rule.REPLAYABLE_SAMPLING and request.seed is None:
        raise GenerationRefused("invalid", "rule 65281 needs a seed", param="seed")


def rule_of(request: GenerationRequest) -> int:
    """The acceptance rule of the request's session."""
    if request.rule is not None:
        return request.rule
    if request.temperature_milli == 0:
        return Rule.GREEDY
    return Rule.SPECULATIVE_SAMPLING if request.seed is None else Rule.REPLAYABLE_SAMPLING


def contract_sampling(request: GenerationRequest) -> ContractSampling | UnsetType:
    """`contract.sampling`: none under rule 1, which no profile can move; the seed under rule 65281 only (18)."""
    rule = rule_of(request)
    if rule == Rule.GREEDY:
        return UNSET
    return ContractSampling(
        temperature_milli=request.temperature_milli,
        top_k=request.top_k or UNSET,
        top_p_milli=UNSET if request.top_p_milli == 1000 else request.top_p_milli,
        seed=request.seed if rule == Rule.REPLAYABLE_SAMPLING and request.seed is not None else UNSET,
    )


def verifier_policy(request: GenerationRequest) -> Sampling | UnsetType:
    """What goes to the verifier alone: the whole profile with its seed, under rule 2 (decision 18)."""
    if rule_of(request) != Rule.SPECULATIVE_SAMPLING or request.seed is None:
        return UNSET
    return Sampling(
        temperature_milli=request.temperature_milli,
        top_k=request.top_k,
        top_p_milli=request.top_p_milli,
        seed=request.seed,
    )
