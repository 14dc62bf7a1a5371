"""Client selection: who is asked in a round."""

from feddkd.rounds.selection.by_loss import oort as oort
from feddkd.rounds.selection.by_loss import power_of_choice as power_of_choice
from feddkd.rounds.selection.rule import SELECTIONS as SELECTIONS
from feddkd.rounds.selection.rule import UNIFORM as UNIFORM
from feddkd.rounds.selection.rule import Selection as Selection
from feddkd.rounds.selection.rule import find_selection as find_selection
