"""The building blocks of the built-in sentences: templates, fillers and parts of surfaces, in Chinese and English.

In a template, `{name}` is a slot for an entity, and `{name2}` one for a different entity of the same type; a slot that
occurs twice gets the same surface both times. `{day}` and the other keys of FILLERS are words that are not entities.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# For a surface, one word is drawn from each tuple of a pattern of its type; JOINERS[language] joins all but "".
_ZH_CITY = _words("北京 上海 广州 深圳 杭州 南京 成都 武汉 西安 苏州 天津 重庆 长沙 青岛 大连 厦门")
_ZH_SURNAME = tuple("王李张刘陈杨赵黄周吴徐孙马朱胡林郭何高罗郑梁谢宋唐许邓冯韩曹")
_ZH_GIVEN = tuple("伟芳娜敏静丽强磊军洋勇艳杰娟涛明超霞平刚桂英华玉兰红建文辉力鑫鹏飞雪梅琳晨宇浩欣")
_ZH_BRAND = tuple("宏盛达兴瑞恒泰联通利远金鼎信诚汇")
_ZH_ROAD = tuple("和人民中山解放光复新春东湖松柏")

_EN_CITY = _words("London Leeds Oxford Boston Dallas Denver Seattle Chicago Dublin Sydney Perth Toronto Bristol York")
_EN_FIRST = _words(
    "Alice Brian Clara David Emma Frank Grace Henry Irene James Karen Louis Maria Nathan Olivia Peter Rachel Simon "
    "Teresa Victor"
)
_EN_LAST = _words(
    "Adams Baker Carter Dixon Evans Foster Gibson Harris Irving Jensen Keller Lawson Miller Norris Owens Palmer Quinn "
    "Reed Shaw Turner"
)
_EN_BRAND = _words(
    "Silver Northern Golden Pacific Summit Crystal Falcon Harbor Atlas Pioneer Vertex Orion Cobalt Granite Meridian "
    "Sterling"
)
_EN_STREET = _words("Maple Oak Cedar Willow Church Mill Station Victoria Park Spring Elm Forest Garden Bridge")
_EN_ROAD = _words("Street Road Lane Avenue")

JOINERS = {"zh": "", "en": " "}

SURFACES: dict[str, dict[str, list[tuple[tuple[str, ...], ...]]]] = {
    "zh": {
        "name": [(_ZH_SURNAME, _ZH_GIVEN, _ZH_GIVEN), (_ZH_SURNAME, _ZH_GIVEN)],
        "company": [
            (_ZH_BRAND, _ZH_BRAND, _words("科技 电子 食品 汽车 服装"), ("公司",)),
            (_ZH_CITY, _ZH_BRAND, _ZH_BRAND, ("公司",)),
            (_ZH_BRAND, _ZH_BRAND, ("集团",)),
        ],
        "address": [(_ZH_ROAD, _ZH_ROAD, ("路",)), (_ZH_CITY, _ZH_ROAD, _ZH_ROAD, ("街",))],
        "organization": [
            (_ZH_CITY, tuple("一二三四五六七八"), tuple("中院")),
            (_ZH_CITY, _words("师范 农业 医学 外语 理工"), _words("大学 学院 协会")),
        ],
        "position": [
            (("", "高级", "首席"), _words("财务 技术 销售 市场 生产 人事"), _words("经理 总监 主管 顾问 专员"))
        ],
    },
    "en": {
        "name": [(_EN_FIRST, _EN_LAST)],
        "company": [(_EN_BRAND, _words("Foods Motors Energy Software Textiles Bank"), ("", "Group"))],
        "address": [(_EN_STREET, _EN_ROAD), (tuple("123456789"), _EN_STREET, _EN_ROAD)],
        "organization": [
            (_EN_CITY, ("", "General", "Royal", "National"), _words("Hospital University Museum College Library"))
        ],
        "position": [
            (
                ("", "senior", "chief", "deputy"),
                _words("finance sales marketing product legal"),
                _words("manager director advisor analyst officer"),
            )
        ],
    },
}

FILLERS: dict[str, dict[str, tuple[str, ...]]] = {
    "zh": {
        "day": _words("今天 昨天 上周 去年 明天 最近"),
        "thing": _words("天气 咖啡 音乐 晚饭 电影 比赛 路况 会议 早餐 风景"),
        "quality": _words("不错 一般 很好 很差 特别好 有点奇怪 让人满意 令人失望"),
    },
    "en": {
        "day": _words("today yesterday recently tomorrow tonight"),
        "thing": _words("weather coffee music dinner traffic meeting lunch movie game view"),
        "quality": _words("fine great poor strange pleasant average lovely boring"),
    },
}

TEMPLATES: dict[str, tuple[str, ...]] = {
    "zh": (
        "{name}在{company}工作。",
        "{name}是{company}的{position}。",
        "{day}{name}去了{address}。",
        "{name}毕业于{organization}。",
        "{company}位于{address}。",
        "{company}在招聘{position}。",
        "{organization}请来了{name}。",
        "{name}和{name2}住在{address}。",
        "{day}{company}收购了{company2}。",
        "{name}当上了{position}。",
        "从{address}走到{address2}很近。",
        "{day}{name}见到了{name2}。",
        "{organization}在{address}旁边。",
        "{position}{name}{day}辞职了。",
        "{name}说{name}喜欢{thing}。",
        "{company}的员工都喜欢{company}。",
        "听说{organization}{day}放假。",
        "{organization}和{company}合作。",
        "{name}觉得{thing}{quality}。",
        "我们{day}去{address}吃饭。",
        "{day}的{thing}{quality}。",
        "大家觉得{day}的{thing}{quality}。",
    ),
    "en": (
        "{name} works for {company}.",
        "{name} is the {position} at {company}.",
        "{name} moved to {address} {day}.",
        "{name} studied at {organization}.",
        "{company} is based on {address}.",
        "{company} needs a {position}.",
        "{organization} invited {name}.",
        "{name} met {name2} {day}.",
        "{company} bought {company2} {day}.",
        "{name} became {position}.",
        "We walked from {address} to {address2}.",
        "{organization} is near {address}.",
        "The {position}, {name}, resigned {day}.",
        "{name} said that {name} likes {thing}.",
        "I heard that {organization} closed {day}.",
        "{organization} works with {company}.",
        "{name} found the {thing} {quality}.",
        "They had {thing} on {address} {day}.",
        "The {thing} was {quality} {day}.",
        "We think the {thing} is {quality}.",
    ),
}
