"""
The words, in many languages, that judges use for scores: labels, numbers, units and verdicts.

Each constant is either a list of words or a pattern for `re` in which `|` separates the words.
Upper and lower case do not matter. judging/replies.py uses these constants.
"""

NUMBERS = {
    0: "zero null zéro cero ноль 零",
    1: "one eins un uno um один jeden 一 壱 하나",
    2: "two zwei deux dos due dois два twee dwa 二 둘",
    3: "three drei trois tres tre três три drie trzy 三 셋",
    4: "four vier quatre cuatro quattro quatro четыре cztery 四 넷",
    5: "five fünf cinq cinco cinque пять vijf pięć 五 다섯",
    6: "six sechs seis sei шесть zes",
    7: "seven sieben sept siete sette семь zeven",
    8: "eight acht huit ocho otto oito восемь",
    9: "nine neun neuf nueve nove девять negen",
    10: "ten zehn dix diez dieci dez десять tien 十",
}

# If the number after one of these labels is not a score, the reply is unreadable.
LABELS = """
    score rating bewertung punktzahl wertung benotung gesamtnote notation évaluation puntuación
    puntaje calificación valoración punteggio valutazione voto pontuação avaliação classificação
    оценка оценку рейтинг балл баллы оцінка бал ocena punktacja hodnocení hodnotenie skóre
    beoordeling waardering betyg poäng vurdering poeng pisteet arvosana pistemäärä pontszám
    értékelés punctaj scor puan skor skoru βαθμολογία βαθμός σκορ điểm الدرجة التقييم تقييم درجة
    ציון דירוג स्कोर रेटिंग अंक คะแนน امتیاز نمره 评分 得分 分数 打分 评级 評分 分數 評価 点数 スコア
    得点 採点 評点 점수 평점 평가 스코어
"""

# Words that also have other meanings, so they count as labels only if a score follows.
WEAK_LABELS = """
    note nota grade mark marks points result answer verdict evaluation assessment judgment judgement
    overall total final conclusion ergebnis urteil gesamt punkte cijfer nilai karakter wynik známka
    notă not insgesamt итог общая 总分 総合 총점 정답 结论
"""

OVERALL = (
    "final|overall|total|global|gesamt|insgesamt|finale"
    "|итог|итоговая|общая|总|最终|综合|総合|最終|최종|종합|총"
)

# A label next to one of these words does not introduce a score, as in "score explanation:".
NO_LABEL = (
    "explanation|justification|reason|reasoning|rationale|criteria|guide|guidelines|scale|range"
    "|breakdown|meaning|rubric|system|description|because|since|why|depends?|based"
    "|begründung|explication|razón"
)

# A number after one of these names is not a score: "step 1: 3".
NO_NAME = "criterion|step|part|question|item|point|note|section|count|number|total\\s+of"

UNITS = (
    "points?|pts?|stars?|marks?|punkten?|sternen?|étoiles?|puntos?|estrellas?|punti|stelle|pontos?"
    "|estrelas?|балл(?:а|ов)?|звезды|звёзды|punten|sterren|poäng|poeng|puan|điểm"  # noqa: RUF001
)
UNITS_WITHOUT_SPACE = "分|点|點|점|つ星|星"

# Words between two numbers, such as "out of" in "4 out of 5". In the next pattern, the 5 comes
# first: "5点中4点".
OVER = "/|out\\s+of|of|von|aus|de|sur|su|из|van|av|af|em|dari|trên|od|z|op|από|من"
OVER_AFTER_WHOLE = "満点中|中的?|만점에|만점 중|에서|üzerinden|में से"
POLITE_IS = "입니다|이에요|です"

# words between two numbers, as in "3 to 4" and "3 or 4"
RANGE = "to|or|and|bis|oder|und|ou|et|o|y|e|a|à|или|и|до|から|或者|或|至|到|와|또는"
# words in descriptions of a scale, as in "1 to 5" and "a scale"
SCALE_TO = "-|\u2013|\u2014|~|to|through|bis|a|à|al|até|do|до|tot|til|till|から|到|至"
SCALE = "scale|skala|échelle|escala|scala"

# Words that may follow directly after a score, such as "because" in "4 because".
AFTER_A_SCORE = (
    "because|since|as|for|to|with|but|and|on|due|given|it|the|this|that|there|answer|response|reply"
    "|overall|weil|da|denn|die|der|das|car|parce|le|la|porque|el|perché|il|потому|так|ответ|因为|因為"
)
ARTICLES = "an?|une?|una|um|eine?|een"
IS = "is|ist|est|es|equals"

# words before a score in a sentence, as in "I give it a 4" and "so 4"
GIVES = (
    "give|gives|gave|giving|assign|award|rate|grade|score|scores|deserves?|earns?|gets?|merits?"
    "|receives?|say|choose|vergebe|gebe|donne|doy|daría|darei|dou|ставлю|geef"
)
GIVEN_TO = "it|this|that|the|answer|response|reply|one|completion|dafür|hier"
SO = "so|therefore|thus|hence|also|daher|donc|entonces|quindi"
VERDICT_WITHOUT_SPACE = "поэтому|所以|给出?|給|打|付け"
DENIES = "not|never|cannot|no|nor|if|unless|instead|rather|could|might|than"
