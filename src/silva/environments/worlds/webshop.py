"""WebShop (arXiv:2207.01206): find a product in a web store, choose its options, buy it.

    search[double walled coffee mug]  ->  click[b0a1b2c3d4]  ->  click[navy blue]  ->  click[buy now]

The reward says how well the bought product fits the instruction (`webshop_reward`): 1 only for a perfect
match, which alone is a success; less for a partial one. The store sells the products of a file in WebShop's
format, or a small made-up catalogue. Every goal can be reached: goals that their own product does not fit are
left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from silva.config.sections import Natural, Positive
from silva.environments.bases.environment import BaseEnvironment
from silva.environments.bases.text_game import TextGameSettings
from silva.environments.tasks import Draft, Tasks, listed
from silva.environments.worlds.webshop_catalogue import BRANDS
from silva.environments.worlds.webshop_products import Goal
from silva.environments.worlds.webshop_reward import match
from silva.environments.worlds.webshop_store import Store, made_up, open_store
from silva.types import Message, Observation, Step, Task

SEARCH, RESULTS, ITEM, DESCRIPTION, FEATURES = "search", "results", "item", "description", "features"
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
BUTTONS = (BACK, NEXT, PREVIOUS, BUY, DESCRIPTION, FEATURES)
_ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.DOTALL | re.IGNORECASE)


class WebShop(TextGameSettings):
    reward_range: ClassVar = (0.0, 1.0)

    type: Literal["webshop"] = "webshop"
    products: str = ""
    """File of products in the format of WebShop's items_shuffle.json; empty: a made-up catalogue."""
    instructions: str = ""
    """Attributes and instructions of these products, as items_ins_v2.json."""
    human_instructions: str = ""
    """Instructions written by people, as items_human_ins.json; they replace those of `instructions`."""
    max_products: Natural = 0
    """Only the first products of the file; 0: all."""
    catalogue_size: Annotated[int, Field(ge=1, le=BRANDS)] = 300
    """Products of the made-up catalogue."""
    catalogue_seed: Natural = 0
    """Another seed makes another catalogue."""
    goals_per_product: Positive = 3
    """Goals made from one product, which differ in their options; not for `human_instructions`."""
    partial: bool = True
    """Partial matches earn a part of the reward; off: nothing but a perfect match earns anything."""
    results: Positive = 50
    """Products that a search finds at most."""
    page_size: Positive = 10
    """Products on a page of results."""
    layout: Literal["lines", "sep"] = "lines"
    """`sep` shows pages as WebShop's text mode: the instruction on every page, parts joined by [SEP]."""
    show_actions: bool = False
    """List the actions that are possible below every page."""
    eval_size: Positive = 128
    """Held-out tasks, disjoint from the training tasks by content."""
    max_actions: Positive = 15
    """Actions of one episode; a turn without a valid action uses up one."""
    max_actions_per_turn: Positive = 1
    """Further actions of the same turn are ignored."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if bool(self.products) != bool(self.instructions):
            raise ValueError("set both `products` and `instructions` (items_ins_v2.json), or none of them")
        if self.human_instructions and not self.products:
            raise ValueError("human_instructions is set, but `products` is not")
        return self

    def taskset(self) -> Tasks:
        if self.products:
            store = open_store(
                self.products,
                self.instructions,
                self.human_instructions,
                self.max_products,
                self.goals_per_product,
            )
        else:
            store = made_up(self.catalogue_size, self.catalogue_seed, self.goals_per_product)
        # All goals of a product are in one split.
        drafts = [Draft(goal._asdict(), keys=[goal.asin]) for goal in store.goals]
        return listed(self, drafts, lambda task: Visit(self, task, store))


class View(NamedTuple):
    """Where a visitor is, and what was chosen; an action leads to the next view.

    Attributes:
        found: products of the last search.
        first: index in `found` of the first one on the page.
        chosen: options of the product, by name.
    """

    page: str = SEARCH
    query: str = ""
    found: Sequence[int] = ()
    first: int = 0
    product: int = -1
    chosen: Mapping[str, str] = {}
    bought: bool = False


class Visit(BaseEnvironment):
    """One visit to the store: a `Forkable` and `Scripted` environment."""

    settings: WebShop

    def __init__(self, settings: WebShop, task: Task, store: Store) -> None:
        super().__init__(settings, task)
        self.store = store
        self.goal = Goal(**task.data)
        self.actions_left = settings.max_actions
        self.view = View()

    async def reset(self) -> Observation:
        self._begin()
        return self._observe([] if self.settings.style == "compact" else [self._rules()], opening=True)

    async def step(self, message: Message) -> Step:
        self._check_running()
        effective = taken = 0
        texts = self._actions(message)
        problem = "" if texts else f"No action was read. {self._form()}"
        for text in texts[: min(self.settings.max_actions_per_turn, self.actions_left)]:
            before = self.view
            problem = self.act(text)
            if problem:
                break
            taken += 1
            effective += self.view != before
            if self.view.bought:
                break
        self.actions_left -= max(taken, 1)
        return self._step(problem, {
            "action_is_valid": float(not problem),
            "action_is_effective": effective / taken if taken else 0.0,
            "actions": float(taken),
        })  # fmt: skip

    def act(self, text: str) -> str:
        """Does one action, written as search[words] or click[text]; says what is wrong with it, if it is."""
        found = _ACTION.fullmatch(text.strip())
        if not found:
            return f"{_quoted(text)} is no action. {self._form()}"
        argument = " ".join(found[2].split())
        if found[1].lower() == "click":
            if (there := self.buttons().get(argument.lower())) is None:
                return f"There is nothing called {_quoted(argument)} to click on this page."
            self.view = there
            return ""
        if self.view.page != SEARCH:
            return f"This page has no search bar: click[{BACK}] first."
        if not argument:
            return "A search needs words: search[words]."
        self.view = View(RESULTS, argument, self.store.ranking.best(argument, self.settings.results))
        return ""

    def buttons(self) -> dict[str, View]:
        """What can be clicked on this page, in its order, and where it leads."""
        here, size = self.view, self.settings.page_size
        if here.page == SEARCH:
            return {}
        found = {BACK: View()}
        if here.page == RESULTS:
            if here.first > 0:
                found[PREVIOUS] = here._replace(first=here.first - size)
            if here.first + size < len(here.found):
                found[NEXT] = here._replace(first=here.first + size)
            for number in self._shown():
                asin = self.store.products[number].asin.lower()
                found[asin] = here._replace(page=ITEM, product=number, chosen={})
            return found
        if here.page != ITEM:
            return found | {PREVIOUS: here._replace(page=ITEM)}
        found[PREVIOUS] = here._replace(page=RESULTS)
        for label, (name, value) in self._labels().items():
            found[label] = here._replace(chosen={**here.chosen, name: value})
        found |= {page: here._replace(page=page) for page in (DESCRIPTION, FEATURES)}
        return found | {BUY: here._replace(bought=True)}

    def expert_reply(self) -> str:
        """The next action on a short way to the goal's own product, from any page."""
        return self.settings.reply_form.say(self._expert_action())

    def random_reply(self, seed: int) -> str:
        """A search for a random kind of product, or a click on something of the page."""
        rng = random.Random(f"{seed}/{self.actions_left}")
        search = self.view.page == SEARCH
        action = rng.choice(self.store.queries if search else list(self.buttons()))
        return self.settings.reply_form.say(f"{'search' if search else 'click'}[{action}]")

    def _shown(self) -> Sequence[int]:
        first = self.view.first
        return self.view.found[first : first + self.settings.page_size]

    def _labels(self) -> Mapping[str, tuple[str, str]]:
        """What to click for each value of an option: the value, after its option if it would be ambiguous."""
        options = self.store.products[self.view.product].options
        pairs = [(name, value) for name, values in options.items() for value in values]
        values = [value for _, value in pairs]
        return {
            f"{name}: {value}" if values.count(value) > 1 or value in BUTTONS else value: (name, value)
            for name, value in pairs
        }

    def _expert_action(self) -> str:
        wanted, here = self.store.number[self.goal.asin], self.view
        if here.page == SEARCH:
            return f"search[{self._expert_query(wanted)}]"
        if here.page == RESULTS:
            if wanted in self._shown():
                return f"click[{self.goal.asin.lower()}]"
            return f"click[{NEXT if wanted in here.found[here.first :] else BACK}]"
        if here.product != wanted:
            return f"click[{BACK}]"
        if here.page != ITEM:
            return f"click[{PREVIOUS}]"
        choices = self.store.choices(self.goal)
        for label, (name, value) in self._labels().items():
            if choices.get(name) == value != here.chosen.get(name):
                return f"click[{label}]"
        return f"click[{BUY}]"

    def _expert_query(self, wanted: int) -> str:
        """Words that the instruction has; if they do not find the product, its title."""
        product = self.store.products[wanted]
        honest = f"{' '.join(self.goal.attributes)} {product.query}"
        if wanted in self.store.ranking.best(honest, self.settings.results):
            return honest
        return product.title.replace(self.settings.separator, " ")

    # What is shown.

    def _step(self, problem: str, metrics: Mapping[str, float]) -> Step:
        bought = self.view.bought
        out = self.actions_left <= 0 and not bought
        reward, ending = 0.0, {"success": 0.0, "match_score": 0.0} if out else {}
        if bought:
            product, wanted = self.store.products[self.view.product], self.store.wanted(self.goal)
            got = match(product, self.view.chosen, self.goal, wanted)
            reward = got.score if self.settings.partial or got.perfect else 0.0
            ending = {"success": float(got.perfect), **{f"match_{k}": v for k, v in got._asdict().items()}}
        if bought or out:
            self._end()
        notes = [problem] if problem else []
        return Step(
            Observation((self.say("You bought the product."),)) if bought else self._observe(notes),
            rewards={"match": reward},
            shaped={"format": 0.0 if metrics["actions"] else self.settings.format_penalty},
            terminated=bought,
            truncated=out,
            metrics={**metrics, **ending},
        )

    def _observe(self, notes: Sequence[str], opening: bool = False) -> Observation:
        page = self._page()
        if self.settings.layout == "sep":
            page = [" [SEP] ".join(["Instruction:", self.goal.instruction, *page])]
        elif opening:
            page = [f"{self.goal.instruction}.", *page]
        if self.settings.show_actions:
            clicks = [f"click[{label}]" for label in self.buttons()] or ["search[words]"]
            page.append(f"Possible actions: {', '.join(clicks)}")
        left = self.actions_left
        count = str(left) if self.settings.style == "compact" else f"Actions left: {left}."
        return Observation(
            (self.say("\n".join([*notes, *page, count])),), prefill=self.settings.reply_form.prefill
        )

    def _page(self) -> list[str]:
        """The parts of the page. What can be clicked stands in brackets, unless the layout is WebShop's."""
        plain, here = self.settings.layout == "sep", self.view

        def mark(label: str, shown: str = "") -> str:
            return (shown or label) if plain else f"[{label}]"

        navigation = [label for label in self.buttons() if label in BUTTONS]
        if here.page == SEARCH:
            return ["Search"] if plain else ["Search page"]
        bar = [mark(label, label.title().replace(" To ", " to ")) for label in navigation]
        if not plain:
            bar = [" ".join(bar)]
        if here.page == RESULTS:
            number = here.first // self.settings.page_size + 1
            head = f"Page {number} (Total results: {len(here.found)})"
            rows: list[str] = []
            for index in self._shown():
                product = self.store.products[index]
                row = [mark(product.asin.lower(), product.asin), product.title, f"${product.price:.2f}"]
                rows += row if plain else [" ".join(row)]
            return [head, *rows, *bar]
        product = self.store.products[here.product]
        if here.page == DESCRIPTION:
            return [product.description or "No description.", *bar]
        if here.page == FEATURES:
            return [*(product.features or ("No features.",)), *bar]
        options: list[str] = []
        for name in product.options:
            labels = [label for label, (option, _) in self._labels().items() if option == name]
            state = f" (chosen: {here.chosen[name]})" if name in here.chosen else ""
            values = [mark(label) for label in labels]
            options += [name, *values] if plain else [f"{name}{state}: {' '.join(values)}"]
        return [product.title, f"Price: ${product.price:.2f}", *options, *bar]

    def _rules(self) -> str:
        several = self.settings.max_actions_per_turn > 1
        limit = (
            f" At most {self.settings.max_actions_per_turn} actions a turn, with {self.settings.separator} "
            "between them."
        )
        return (
            "You are in a web store. Find a product that fits the instruction, choose its options and buy "
            f"it: click[{BUY}] ends the visit.\nActions: search[words] on the search page, elsewhere "
            f"click[text] with a text of the page{' in brackets' if self.settings.layout == 'lines' else ''}."
            f"{limit if several else ''}\n{self._form()}"
        )

    def _form(self) -> str:
        return self.settings.reply_form.ask("click[text]")

    def _actions(self, message: Message) -> list[str]:
        answer = self.settings.reply_form.read(message) or ""
        return [part.strip() for part in answer.split(self.settings.separator) if part.strip()]

    def _shared(self) -> tuple[object, ...]:
        return (*super()._shared(), self.store, self.goal)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
