"""Real data that ships with genkit, synthetic data with known truth, and readers for a user's own files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from genkit._lazy import lazy_exports

if TYPE_CHECKING:
    from genkit.data.digits import Digits as Digits
    from genkit.data.emoji import Emoji as Emoji
    from genkit.data.emoji import EmojiPack as EmojiPack
    from genkit.data.emoji import read_emoji_pack as read_emoji_pack
    from genkit.data.fields import FieldForecast as FieldForecast
    from genkit.data.image_folder import ImageFolder as ImageFolder
    from genkit.data.long_tail import Cifar10LT as Cifar10LT
    from genkit.data.long_tail import exponential_profile as exponential_profile
    from genkit.data.lorenz96 import Lorenz96 as Lorenz96
    from genkit.data.lorenz96 import TwoLevelSystem as TwoLevelSystem
    from genkit.data.mixtures import StableMixture as StableMixture
    from genkit.data.returns import MarketReturns as MarketReturns
    from genkit.data.returns import PriceTable as PriceTable
    from genkit.data.returns import ewma_volatility as ewma_volatility
    from genkit.data.returns import log_returns as log_returns
    from genkit.data.returns import market_closes as market_closes
    from genkit.data.returns import read_price_table as read_price_table
    from genkit.data.stable import positive_stable as positive_stable
    from genkit.data.stable import stable_tail_constant as stable_tail_constant
    from genkit.data.tasks import VerifiableTasks as VerifiableTasks
    from genkit.data.tasks import check_answer as check_answer
    from genkit.data.text import PackedDocuments as PackedDocuments
    from genkit.data.text import PromptResponses as PromptResponses
    from genkit.data.text import TextWindows as TextWindows
    from genkit.data.text import king_james_text as king_james_text
    from genkit.data.text import read_prompt_responses as read_prompt_responses
    from genkit.data.text import read_text_files as read_text_files
    from genkit.data.weather import StationWeather as StationWeather
    from genkit.data.weather import WeatherTable as WeatherTable
    from genkit.data.weather import read_weather_table as read_weather_table

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Digits": ".digits",
        "Emoji": ".emoji",
        "EmojiPack": ".emoji",
        "read_emoji_pack": ".emoji",
        "FieldForecast": ".fields",
        "ImageFolder": ".image_folder",
        "Lorenz96": ".lorenz96",
        "TwoLevelSystem": ".lorenz96",
        "Cifar10LT": ".long_tail",
        "exponential_profile": ".long_tail",
        "MarketReturns": ".returns",
        "PriceTable": ".returns",
        "ewma_volatility": ".returns",
        "log_returns": ".returns",
        "market_closes": ".returns",
        "read_price_table": ".returns",
        "StableMixture": ".mixtures",
        "positive_stable": ".stable",
        "stable_tail_constant": ".stable",
        "VerifiableTasks": ".tasks",
        "check_answer": ".tasks",
        "PackedDocuments": ".text",
        "PromptResponses": ".text",
        "TextWindows": ".text",
        "king_james_text": ".text",
        "read_prompt_responses": ".text",
        "read_text_files": ".text",
        "StationWeather": ".weather",
        "WeatherTable": ".weather",
        "read_weather_table": ".weather",
    },
)
