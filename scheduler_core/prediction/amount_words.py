"""Words that requests for an amount of output are made of: English, German, Spanish, and some French.

Words that mean something else in another of these languages ("once", "sept", "brief") belong to the language in which a
prompt more often asks with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _table(text: str) -> dict[str, str]:
    """Word -> its key, from lines of "key: word word ..."."""
    rows = (line.split(":") for line in text.strip().splitlines())
    return {word: key.strip() for key, words in rows for word in words.split()}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Word -> unit.
UNITS: Final[Mapping[str, str]] = _table("""
words: word words wort wörter wörtern worte worten palabra palabras mot mots
tokens: token tokens
characters: character characters chars zeichen carácter caracteres caractères
pages: page pages seite seiten página páginas pagina paginas
sentences: sentence sentences satz sätze sätzen oración oraciones oracion frase frases phrase phrases
paragraphs: paragraph paragraphs absatz absätze absätzen abschnitt abschnitte abschnitten párrafo párrafos parrafo parrafos
paragraphs: paragraphe paragraphes stanza stanzas strophe strophen estrofa estrofas
lines: line lines zeile zeilen línea líneas linea lineas ligne lignes verso versos
steps: step steps schritte schritten pasos étapes
minutes: minute minutes minuten minütige minütigen minütiger minuto minutos
items: facts ideas tips reasons examples ways bullet bullets suggestions jokes quotes titles headlines slogans synonyms
items: recipes strategies benefits advantages recommendations arguments items hashtags taglines chapters fakten ideen tipps
items: gründe gründen beispiele beispielen punkte punkten stichpunkte stichpunkten vorschläge witze zitate argumente vorteile
items: datos hechos consejos razones ejemplos puntos sugerencias chistes citas títulos argumentos ventajas
items: faits idées conseils raisons exemples
""")
NUMBERS: Final[Mapping[str, float]] = {
    word: float(number)
    for word, number in _table("""
.5: half halbe halben halber media medio demi
1: a an one single ein eine einen einem einer einzigen un una uno une
2: two couple zwei dos deux
3: three few drei tres trois paar
4: four vier cuatro quatre
5: five several fünf cinco cinq einige mehrere varios varias
6: six sechs seis
7: seven sieben siete sept
8: eight acht ocho huit
9: nine neun nueve neuf
10: ten zehn diez dix
11: eleven elf once
12: twelve dozen zwölf doce douze dutzend docena
13: thirteen dreizehn trece
14: fourteen vierzehn catorce
15: fifteen fünfzehn quince quinze
16: sixteen sechzehn dieciséis
17: seventeen siebzehn diecisiete
18: eighteen achtzehn dieciocho
19: nineteen neunzehn diecinueve
20: twenty zwanzig veinte vingt
25: veinticinco
30: thirty dreißig treinta trente
40: forty vierzig cuarenta quarante
50: fifty fünfzig cincuenta cinquante
60: sixty sechzig sesenta soixante
70: seventy siebzig setenta
80: eighty achtzig ochenta
90: ninety neunzig noventa
100: hundred hundert cien ciento cent
200: doscientas doscientos
300: trescientas trescientos
400: cuatrocientas cuatrocientos
500: quinientas quinientos
600: seiscientas seiscientos
700: setecientas setecientos
800: ochocientas ochocientos
900: novecientas novecientos
1000: thousand k tausend mil mille
""").items()
}
ARTICLES: Final = _words("a an ein eine einen einem einer un una une")
#: Number words that say how much only before a unit, as they are common elsewhere.
VAGUE: Final = ARTICLES | _words(
    "one single einzigen uno half halbe halben halber media medio demi couple few several paar"
)
#: Verbs before a number of things: "list 10 animals".
LIST_VERBS: Final = _words("""
list name give suggest provide generate write create brainstorm recommend tell share propose identify mention show make come
produce offer draft compose describe explain state enumerate invent top outline devise nenne nenn nennen gib liste schreib
schreibe erstelle zähle schlage formuliere beschreibe erkläre entwirf erfinde dame da enumera lista escribe menciona nombra
sugiere proporciona genera crea haz dime propón recomienda explica cita describe donne cite écris
""")
#: Words before such a verb that tell the model to do it, as punctuation and the beginning do.
ASKERS: Final = _words("""
please and then also you me us now just i like want need help let can't bitte und dann sie mir por favor y puedes luego
""")
#: Words between such a verb and its number.
BETWEEN: Final = _words("""
me us a an list lists of the top best at least most about exactly up with to some another also out around roughly
approximately precisely just only than more fewer no my him her them and series set or mir uns eine liste von mit etwa genau
mindestens höchstens auf bitte die den der ca ungefähr nos una lista de con al menos unos unas exactamente los las máximo
mínimo hasta une
""")
#: Words after a number that is none of things in the output.
MEASURES: Final = _words("""
minutes minute hours hour days day weeks week months month years year seconds percent dollars euros usd people persons friends
kg km miles meters times million billion th st nd rd am pm degrees x and or to in of is the by with for from on plus minus d using versus are
minuten stunden tage tagen wochen monate jahre jahren personen euro prozent horas días semanas meses años personas pesos
""")
#: Words that end the search for a number before a unit.
BLOCKS: Final = _words("""
of the in with to for from on is are was that this these those my your and into following given by at per has have many der die das
den dem diese dieser dieses mit von im zu für viele el la los las de del en con por para que y le les du cuántas cuántos
""")
#: Words before a number of something in the prompt.
GIVEN: Final = _words("""
first last the this these those following given every my your top next previous how read ersten letzten diese dieser diesen
dieses die den primeras primeros últimas últimos estas estos las los leí ce cette ces
""")
#: Words in front of "a book of 300 pages".
BOOKS: Final = _words(
    "book document novel pdf contract notebook thesis buch dokument vertrag roman libro documento contrato"
)
#: Words before an article that make it a request: "in a sentence", "write a paragraph", but not "given a sentence".
BEFORE_ARTICLE: Final = _words("""
in fill write as within into only compose provide give me than just with using to about single exactly answer : schreibe schreib
nur mit als auf verfasse formuliere antworte einzigen en escribe escribir solo sólo redacta con responde dans écris
""")
#: Words before a number that limit the output, also where the prompt is about code.
LIMITS: Final = _words("""
in under within most than exactly only maximum max limit limited least about around approximately roughly with unter maximal höchstens
genau etwa mindestens máximo mínimo menos exactamente unas
""")
#: Words of prompts about code, whose numbers are mostly those of the problem.
CODE: Final = _words("""
python javascript java sql function program script array pandas numpy dataframe algorithm html css regex def funktion función
programm programa stdin stdout input inputs integer integers string strings
""")
EACH: Final = _words("each every per jeweils cada")
BRIEF: Final = _words("""
brief briefly short shortly concise concisely succinct succinctly tldr terse tersely tl kurz kurze kurzen kurzer kurzes knapp
knappe prägnant breve brevemente conciso concisa concisamente corto corta brièvement court courte
""")
DETAILED: Final = _words("""
detailed detail thorough thoroughly comprehensive comprehensively exhaustive exhaustively extensive extensively lengthy depth
elaborate ausführlich ausführliche ausführlichen ausführlicher detailliert detaillierte detaillierten umfassend umfassende
gründlich detallado detallada detalladamente detalle exhaustivo exhaustiva profundidad extenso extensa détaillé détail
""")
#: Word -> form of text.
FORMS: Final[Mapping[str, str]] = _table("""
title: title titel título headline überschrift titular
slogan: slogan tagline motto eslogan
haiku: haiku
tweet: tweet caption tuit
poem: poem gedicht poema limerick poème
email: email mail correo
letter: letter carta
summary: summary zusammenfassung resumen
post: post beitrag
outline: outline gliederung esquema
speech: speech rede discurso
story: story geschichte historia cuento märchen histoire
article: article artikel artículo blog
essay: essay aufsatz ensayo
report: report bericht informe
chapter: chapter kapitel capítulo
""")
#: Verbs before a form of text.
WRITES: Final = _words("""
write create compose generate draft give make need want writing schreibe schreib verfasse erstelle entwirf gib escribe redacta
crea genera dame écris rédige
""")
ONLY: Final = _words("only just single nothing nur lediglich solo sólo solamente únicamente seulement")
#: Words of `requested_amount`'s patterns for a choice, and for one word or letter.
CHOICES: Final = _words("yes true ja sí si oui")
LETTERS: Final = _words("letter word number digit buchstaben buchstabe wort zahl letra palabra mot")
