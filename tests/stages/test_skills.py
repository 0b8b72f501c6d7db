"""Questions that measure forgetting: deterministic, answerable, and far above the stated chance."""

import collections

from turntree_worlds import skills


def test_the_same_seed_asks_the_same_questions():
    assert list(skills.questions(3, 20)) == list(skills.questions(3, 20))
    assert list(skills.questions(3, 20)) != list(skills.questions(4, 20))


def test_every_skill_is_asked_equally():
    counted = collections.Counter(question.skill for question in skills.questions(0, 11))
    assert counted == {skill.name: 11 for skill in skills.SKILLS if skill.asked}


def test_answers_are_compared_word_by_word():
    question = skills.Question("owner", "...", "a red hat", 1 / 3)
    assert question.correct(" a red  hat ")
    assert not question.correct("a red")


def test_no_constant_answer_beats_the_stated_chance():
    for skill in skills.SKILLS:
        if not skill.asked:
            continue
        answers = collections.Counter(q.answer for q in skills.questions(1, 2000) if q.skill == skill.name)
        assert max(answers.values()) / 2000 <= skill.chance + 0.03, skill.name
